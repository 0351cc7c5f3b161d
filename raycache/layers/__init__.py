"""Building blocks of models, each on one rank's share of the weights."""
