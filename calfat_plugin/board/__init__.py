"""Leaderboards that check their entries: ``calfat board``."""
