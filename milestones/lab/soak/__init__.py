"""The soak: random schedules for all engines, with known answers, failures and interrupts."""
