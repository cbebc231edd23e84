"""Isolation of Python that a model wrote.

base         what every box gives: sessions, observations, and the tool for a rollout
jail         what a process inside sees: Python, its standard library, an empty folder; nothing else
seccomp      the system calls it may not make
runner       runs inside: takes cells, keeps their variables, answers
interpreter  the outside end of one runner: its clock, its output, its death
memory       how much the processes of one interpreter use
fusion       the same interface over a SandboxFusion server
"""
