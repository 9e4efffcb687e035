"""Bodies of requests and answers: the JSON contract of the API, and nothing that computes."""
