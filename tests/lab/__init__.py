"""Several hosts on one machine, and what is tested on them."""
