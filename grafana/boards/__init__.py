"""The dashboards, one module each, out of `parts`; nothing here is imported by the package."""
