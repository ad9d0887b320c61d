"""OpenAI's Responses API: answers as lists of items, conversations that the server keeps, and work in the background.

schemas        the bodies that clients may send
items          items of a conversation, and the chat messages that they become
tools          the tools of a request, as functions that the model may call
planning       from a request and its earlier turns to the plan of a chat
output         items of an answer, the logprobs of its text, and the events that tell of them
builder        one response, from its beginning to its end
store          the responses that are kept
conversation_store  the conversations that are kept
conversations  the routes of conversations
kept           access of the routes to the stores, with the API's errors
runs           responses while they are computed: for a client that waits, and in the background
routes         the routes
"""
