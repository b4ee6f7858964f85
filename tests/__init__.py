"""The run-time type check of the test run: a Python int is a number wherever a float is asked for."""

from beartype import BeartypeConf
from beartype import beartype as plain

beartype = plain(conf=BeartypeConf(is_pep484_tower=True))
