"""Answers as clients of chats see them: content, reasoning and tool calls, parsed from the text of a model.

reader          text that comes piece by piece, for parsers that read it from the beginning to the end
answer          the parts of an answer, and the answer whose text is being read
form            how a model marks its reasoning and writes tool calls; `forms` has one file for each family
parser          one answer's parser
expressions     pieces of grammars, from which tool calls are built
grammar         the constraint that keeps an answer within its forms
structural_tag  the grammar of a structural tag
registry        forms by name, and the form that fits a chat template
"""
