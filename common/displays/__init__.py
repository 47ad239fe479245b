"""What a person watches: dashboards, demos, and measured workloads."""
