"""Plans packs from lengths, and copies tokens into them.

``packstore.pack`` is this folder, and also the call.
"""
