"""How weights move: groups of parameters, schedule, clipping, AdamW and Muon. Knows trees of arrays and no model."""
