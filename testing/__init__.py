"""Fakes and processes that tests, benchmarks and the checks of the exercises share; `pip install` installs them."""
