"""The `char_gpt` workload: a character-level GPT on a text that is always there, with bugs to plant."""
