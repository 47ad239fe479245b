"""`serve disaggregated --prefill 2 --decode 1`: both sides of the elective, as processes.

    replica (decode side)                                prefill process
    LLMEngine > DecodeCore > Receiver                    PrefillCore
                      ProcessTransport  <- messages ->   ChildTransport
                      KVPool            <--- pages ---   PrefillRunner

Schedulers, handshakes and leases are those of the elective, unchanged. What is new is how messages
and pages pass between processes, and what a process that dies leaves behind.
"""
