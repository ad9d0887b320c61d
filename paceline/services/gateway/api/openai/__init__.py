"""OpenAI's chats and completions, and the list of models."""
