"""Answers as clients of chats see them: content, reasoning and tool calls, parsed from the text of a model.

parts       what an answer consists of
reader      text that comes piece by piece, for parsers that read it from the beginning to the end
parser      one answer's parser: a reader, and the forms of the model's reasoning and tool calls
forms       how model families write tool calls; one file each
reasoning   how model families mark their reasoning
schemas     what the JSON schema of a tool says about its arguments, for forms that are no JSON
grammar     the constraint that keeps an answer within these forms
registry    forms by name, and the form that fits a chat template
"""
