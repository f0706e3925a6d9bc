"""Work of operators: batches and audits; nothing of a request imports it."""
