"""The shipped models, as data of the installed package. model.checkpoint.shipped() finds them."""

from pathlib import Path

SHIPPED = ("shakes128", "shakes256", "shakes1024", "shakes2048", "shakes-endless")
PRESENT = tuple(name for name in SHIPPED if Path(__file__).with_name(name).is_dir())  # a wheel has not all
DEFAULT = next(iter(PRESENT), SHIPPED[0])
