"""One script a question."""
