"""Images, videos and audio in requests: fetching, decoding, the model's preprocessing, and their place in a prompt."""
