"""Which sealed block holds which content: a trie of nodes, found by a keyed hash, compared by value.

A *node* is the identity of a sealed block's content: its parent node and its tokens. The root of a tenant
is a node without a block, so prefixes of two tenants never meet. The index maps a keyed 256-bit hash of
(parent's hash, tokens) to a node; a lookup compares the parent (by identity) and the tokens (by value), so
equal hashes of different content are a miss, never a wrong hit. The idea of chained block hashes follows
vLLM's automatic prefix caching; hits inside a block follow the radix tree of SGLang (Zheng et al., 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

TOKEN_BYTES = 4  # one token id, uint32 little-endian
MOST_SIBLINGS = 8  # children compared for a hit inside a block, most recent first

Lru = OrderedDict[int, int]  # cached blocks, oldest first -> the stamp of when they became cached


class Node:
    """Content of one sealed block. Identity is the object: equal content is one node, or not indexed."""

    __deletable__ = ("root",)  # for mypyc: what may be deleted
    __slots__ = ("block", "children", "key", "parent", "root", "tokens")

    def __init__(self, parent: Node | None, tokens: bytes, key: bytes, block: int) -> None:
        self.parent = parent
        self.tokens = tokens  # exactly one block's ids; empty for a root
        self.key = key
        self.block = block  # 0 for a root
        # Nearly every node has at most one child, so a dict is only made for the second: first token ->
        # nodes in order of sealing.
        self.children: Node | dict[bytes, dict[Node, None]] | None = None
        if parent is not None:
            self.root: Root = parent.root

    def offspring(self) -> Iterator[Node]:
        """Every child, in the order in which siblings with equal first tokens were sealed."""
        if isinstance(self.children, Node):
            yield self.children
        elif self.children is not None:
            for bucket in self.children.values():
                yield from bucket


class Root(Node):
    """Where the chains of one tenant start. It lives while it has children or tables."""

    __slots__ = ("lru", "tables", "tenant")

    def __init__(self, tenant: str, key: bytes, lru: Lru) -> None:
        super().__init__(None, b"", key, 0)
        self.root = self
        self.lru = lru  # where this tenant's blocks wait while nobody references them
        self.tenant = tenant
        self.tables = 0  # live sequences of this tenant


@dataclass(slots=True)
class Hit:
    """How much of a prompt is cached."""

    nodes: list[Node]  # whole blocks, from the root on
    source: Node | None  # a block that matches some tokens more
    computed: int  # tokens covered, those of `source` included


class PrefixIndex:
    """The index of one pool. It references nothing: who may evict a block is the pool's business.

    Args:
        secret: key of the hash, up to 64 bytes.
        salt: all that content depends on besides tokens: model, dtype, block size.
        block_size: tokens per block.
        hash_bits: a test hook that cuts the hash so that collisions happen.
    """

    def __init__(self, secret: bytes, salt: bytes, block_size: int, hash_bits: int = 256) -> None:
        self._hasher = blake2b(key=secret, digest_size=32)
        self._salt = salt
        self._width = block_size * TOKEN_BYTES
        self._cut = hash_bits if hash_bits < 256 else 0
        self.by_key: dict[bytes, Node] = {}
        self.roots: dict[str, Root] = {}

    def key_of(self, parent: Node, tokens: bytes) -> bytes:
        """Hash of the block with these tokens after `parent`."""
        hasher = self._hasher.copy()  # faster than a new one: the secret is absorbed already
        hasher.update(parent.key + tokens)
        digest = hasher.digest()
        return self._shorten(digest) if self._cut else digest

    def _shorten(self, digest: bytes) -> bytes:
        size = (self._cut + 7) // 8
        return (int.from_bytes(digest[:size], "big") >> (size * 8 - self._cut)).to_bytes(
            size, "big"
        )

    def root(self, tenant: str, lru: Lru) -> Root:
        """The root of a tenant, made when there is none."""
        root = self.roots.get(tenant)
        if root is None:
            hasher = self._hasher.copy()
            hasher.update(b"root\0" + self._salt + b"\0" + tenant.encode("utf-8", "surrogatepass"))
            root = self.roots[tenant] = Root(tenant, hasher.digest(), lru)
        return root

    def drop_root_if_unused(self, root: Root) -> None:
        """Forget a tenant that has neither sequences nor sealed blocks."""
        if root.tables == 0 and not root.children:
            del self.roots[root.tenant]
            del root.root  # a cycle, and memd rarely runs Python's collector

    def find(self, parent: Node, tokens: bytes) -> Node | None:
        """The node with exactly this content."""
        node = self.by_key.get(self.key_of(parent, tokens))
        if node is not None and node.parent is parent and node.tokens == tokens:
            return node
        return None

    def longest(self, tenant: str, tokens: bytes) -> Hit:
        """The longest cached prefix of a prompt, at most all but its last token. Changes nothing."""
        node: Node | None = self.roots.get(tenant)
        nodes: list[Node] = []
        if node is None:
            return Hit(nodes, None, 0)
        width = self._width
        most = len(tokens) - TOKEN_BYTES  # bytes: the last token is always computed, for its logits
        at = 0
        while at + width <= most:
            child = self.find(node, tokens[at : at + width])
            if child is None:
                break
            nodes.append(child)
            node = child
            at += width
        source, matched = _best_child(node, tokens[at : min(at + width, most)])
        return Hit(nodes, source, at // TOKEN_BYTES + matched)

    def add(self, parent: Node, tokens: bytes, key: bytes, block: int) -> Node:
        """Index a block under a key that is free."""
        node = self.by_key[key] = Node(parent, tokens, key, block)
        children = parent.children
        if children is None:
            parent.children = node
        else:
            if isinstance(children, Node):
                children = parent.children = {children.tokens[:TOKEN_BYTES]: {children: None}}
            children.setdefault(tokens[:TOKEN_BYTES], {})[node] = None
        return node

    def remove(self, node: Node) -> None:
        """Forget a node without children."""
        del self.by_key[node.key]
        parent = node.parent
        assert parent is not None  # roots are never in the index
        children = parent.children
        if children is node:
            parent.children = None
        elif isinstance(children, dict):
            first = node.tokens[:TOKEN_BYTES]
            bucket = children[first]
            del bucket[node]
            if not bucket:
                del children[first]
        if parent.parent is None:
            self.drop_root_if_unused(parent.root)


def _best_child(node: Node, rest: bytes) -> tuple[Node | None, int]:
    """The child that shares most leading tokens with `rest`, and how many."""
    children = node.children
    if children is None or not rest:
        return None, 0
    candidates: list[Node]
    if isinstance(children, Node):
        candidates = [children]
    else:
        bucket = children.get(rest[:TOKEN_BYTES])
        if not bucket:
            return None, 0
        candidates = list(islice(reversed(bucket), MOST_SIBLINGS))
    best: Node | None = None
    matched = 0
    for child in candidates:
        if (length := common_tokens(child.tokens, rest)) > matched:
            best, matched = child, length
    return best, matched


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading token ids two packed strings share."""
    size = min(len(a), len(b))
    difference = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    if not difference:
        return size // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
