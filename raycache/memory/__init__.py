"""State that tokens leave behind, as data, and the pools that hold it."""
