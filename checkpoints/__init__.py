"""The shipped models. A wheel has not all of them."""

from pathlib import Path

SHIPPED = ("shakes128", "shakes256", "shakes1024", "shakes2048")
DEFAULT = next((name for name in SHIPPED if Path(__file__).with_name(name).is_dir()), SHIPPED[0])
