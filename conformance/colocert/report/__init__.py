"""What was judged, for people and for machines: failure text, summary, transcripts, certificate, spec page."""
