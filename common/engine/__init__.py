"""What all engines share: their interface, failures, interrupts, and `generate`."""
