"""What tests of pages in a browser share; the fixture `browser` is in `tests/report/conftest.py`."""

PATIENCE_S = 60.0
PHONE, DESK = 390, 1280
