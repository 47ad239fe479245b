"""What a person watches: dashboards, demos, and measured workloads."""

from ..interrupts import show_as_one_line

show_as_one_line()  # here, because the modules of a demo take seconds to import
