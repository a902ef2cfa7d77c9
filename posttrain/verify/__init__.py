"""Rewards: answer extraction and comparison, running reward scripts safely, combining scores. No torch here."""
