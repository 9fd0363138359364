"""Check a target and its draft before serving. Independent of methods, which provide their own checks."""

from outrider.doctor.checkup import Acceptance, Checkup, Patient, check_up

__all__ = ["Acceptance", "Checkup", "Patient", "check_up"]
