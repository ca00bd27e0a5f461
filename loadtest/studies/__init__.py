"""Measurements that answered one question each: `python -m quire.loadtest.studies --help`.  Not in the wheel."""
