"""Models that draft tokens for another, read and checked as `--draft` says."""
