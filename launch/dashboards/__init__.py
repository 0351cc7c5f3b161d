"""Generates a Grafana dashboard, alert rules and a Prometheus configuration from the table of metrics."""
