"""The recorded runs that a build writes as pages of the player. The handouts link to steps."""

# Worked examples of `workloads.py`: the same three requests on each milestone, and a retraction.
RUN_PAGES = ("m2_example", "m3_retract", "m4_example", "m5_example")
