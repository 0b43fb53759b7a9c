"""Plans packs from lengths, and copies tokens into them; ``packstore.pack`` is also the
call.
"""
