"""Model directories: config.json, weights, quantisation, and downloads from the Hub."""
