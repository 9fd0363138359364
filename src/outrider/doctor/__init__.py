"""The room that looks at a target and what is to draft for it before anything is served. Knows no method: it asks each one."""

from outrider.doctor.checkup import Acceptance, Checkup, Patient, check_up

__all__ = ["Acceptance", "Checkup", "Patient", "check_up"]
