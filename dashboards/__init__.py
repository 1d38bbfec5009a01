"""One marimo app a question. The apps read the views of schema `orch` and nothing else; `orch ui` serves them."""
