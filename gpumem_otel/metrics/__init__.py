"""Metrics: the METRICS table, its values, and their export to Prometheus and OTLP."""
