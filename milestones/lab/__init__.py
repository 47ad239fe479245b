"""What measures and attacks the engines: benchmarks, the soak, and instruments for tests."""

from common.interrupts import show_as_one_line

show_as_one_line()  # here, because the modules of a command take seconds to import
