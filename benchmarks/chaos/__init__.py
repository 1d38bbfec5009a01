"""Kills every process of a sweep at random moments, resumes, and asks SQL whether anything is lost or doubled."""
