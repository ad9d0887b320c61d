"""Planning: a request's body becomes a plan. No worker is needed.

In: a body of any API. Out: a `Plan`: prompts as token ids, media, sampling parameters, wanted constraints. `planning`
makes the plan; `tokenizer` and `chat_template` belong to the model; `media` and `constraints` use own processes.
"""
