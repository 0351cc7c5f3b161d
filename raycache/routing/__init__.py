"""Choice of a replica for each request, and aggregated statistics."""
