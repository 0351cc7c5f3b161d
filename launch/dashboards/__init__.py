"""The Grafana dashboard, the alert rules and the settings of Prometheus, made from the table of metrics."""
