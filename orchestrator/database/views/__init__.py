"""The reading surface of orch: one SQL file a view, documented in its header. Applied by `database/view_catalog.py`."""
