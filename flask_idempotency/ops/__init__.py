"""Work of operators: bounded batches with progress; nothing of a request imports it."""
