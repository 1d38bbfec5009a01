"""PostgreSQL for everything that is stored: the embedded server or a given one, its schemas, its views."""
