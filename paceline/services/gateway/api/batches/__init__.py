"""OpenAI's files and batches: many requests in one file, answered while workers have idle places.

file_store   files and their content, in chunks
upload       the multipart body of an upload, read piece by piece
file_routes  the routes of files
pages        pages of lists of files and batches
batch        one batch and its states
lines        the lines of an input file: their checks, their requests to the application, and the lines of answers
batch_store  batches and the answers to their lines
pressure     how many lines may run now, and lines that the limits of their key refuse
batch_run    one batch, from its validation to its files of answers
runner       the batches that this gateway runs
routes       the routes of batches
messages     Anthropic's message batches: another form of the same batches, and their routes
bodies       bodies of answers
"""
