"""The rules: a catalogue of sentences as data, and one pure fold over events for each. No double and no process."""
