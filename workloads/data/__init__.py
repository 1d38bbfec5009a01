"""Text as numbered characters, and those as batches of a language model."""
