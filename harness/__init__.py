"""The machine: drives cases through the subject, compares with the reference, names what is wrong."""
