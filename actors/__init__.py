"""Ray actors around the library; the only package that imports Ray."""
