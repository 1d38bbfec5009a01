"""Rows from the views become tables, statistics and files. Reads nothing but the views; writes no database."""
