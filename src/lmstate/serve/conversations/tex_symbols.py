"""The commands of TeX that stand for one character, by what they become in MathML."""

from __future__ import annotations


def _table(text: str) -> dict[str, str]:
    """Pairs of a command's name and its character."""
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


IDENTIFIERS = _table("""
alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν
xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
infty ∞ partial ∂ nabla ∇ emptyset ∅ varnothing ∅ hbar ℏ ell ℓ Re ℜ Im ℑ wp ℘ aleph ℵ beth ℶ imath ı jmath ȷ
forall ∀ exists ∃ nexists ∄ top ⊤ bot ⊥ angle ∠ triangle △ square □ blacksquare ■ diamond ⋄ star ⋆ prime ′ degree °
dots … ldots … cdots ⋯ vdots ⋮ ddots ⋱ dotsc … dotsb ⋯ checkmark ✓ dagger † ddagger ‡ S § P ¶ pounds £ euro €
clubsuit ♣ diamondsuit ♢ heartsuit ♡ spadesuit ♠ flat ♭ natural ♮ sharp ♯ complement ∁ surd √ backslash \\
""")
OPERATORS = _table("""
times × div ÷ cdot ⋅ pm ± mp ∓ ast ∗ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ oslash ⊘ odot ⊙ wedge ∧ land ∧ vee ∨
lor ∨ cap ∩ cup ∪ setminus ∖ smallsetminus ∖ sqcap ⊓ sqcup ⊔ uplus ⊎ amalg ⨿ wr ≀ neg ¬ lnot ¬
leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ ll ≪ gg ≫ leqslant ⩽ geqslant ⩾ lesssim ≲ gtrsim ≳ approx ≈ equiv ≡ sim ∼ simeq ≃
cong ≅ propto ∝ doteq ≐ triangleq ≜ coloneqq ≔ asymp ≍ prec ≺ succ ≻ preceq ⪯ succeq ⪰
in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ supsetneq ⊋ sqsubseteq ⊑ sqsupseteq ⊒
mid ∣ nmid ∤ parallel ∥ nparallel ∦ perp ⟂ models ⊨ vdash ⊢ dashv ⊣ vDash ⊨ therefore ∴ because ∵ bowtie ⋈
to → rightarrow → gets ← leftarrow ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ Leftarrow ⇐ impliedby ⟸
Leftrightarrow ⇔ iff ⟺ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ Longleftarrow ⟸ Longleftrightarrow ⟺
longleftrightarrow ⟷ mapsto ↦ longmapsto ⟼ hookrightarrow ↪ hookleftarrow ↩ uparrow ↑ downarrow ↓ updownarrow ↕
Uparrow ⇑ Downarrow ⇓ nearrow ↗ searrow ↘ swarrow ↙ nwarrow ↖ rightleftharpoons ⇌ leftrightharpoons ⇋
rightharpoonup ⇀ leftharpoonup ↼ twoheadrightarrow ↠ rightsquigarrow ⇝ leadsto ⇝ colon :
""")
# Their limits are above and below where there is room.
LARGE = _table("""
sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigsqcup ⨆ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂ bigodot ⨀ biguplus ⨄
""")
INTEGRALS = _table("int ∫ iint ∬ iiint ∭ oint ∮ oiint ∯ smallint ∫")
FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "coth", "exp",
     "log", "ln", "lg", "deg", "dim", "hom", "ker", "arg")
)  # fmt: skip
LIMITS = {
    **{name: name for name in ("lim", "max", "min", "sup", "inf", "det", "gcd", "Pr")},
    "limsup": "lim sup", "liminf": "lim inf", "argmax": "arg max", "argmin": "arg min",
}  # fmt: skip
# Delimiters that are one character, and those that are commands.
MARKS = {**{mark: mark for mark in "()[]/|"}, "<": "⟨", ">": "⟩", ".": ""}
DELIMITERS = {
    **{name: mark for name, mark in OPERATORS.items() if name.lower().endswith("arrow")},
    **_table("""
    { { } } lbrace { rbrace } lbrack [ rbrack ] langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ vert |
    lvert | rvert | Vert ‖ lVert ‖ rVert ‖ | ‖ backslash \\ lgroup ⟮ rgroup ⟯ ulcorner ⌜ urcorner ⌝
    """),
}
# Accents and lines over what follows, and those that stretch.
ACCENTS = _table("hat ^ bar ¯ vec → tilde ~ dot ˙ ddot ¨ check ˇ breve ˘ acute ´ grave ` mathring ˚")
STRETCHED = _table("""
widehat ^ widetilde ~ overline ‾ overrightarrow → overleftarrow ← overleftrightarrow ↔ overbrace ⏞
""")
UNDER = _table("underline ‾ underbrace ⏟ underrightarrow → underleftarrow ←")
SPACES = {
    ",": "0.167em", ":": "0.222em", ">": "0.222em", ";": "0.278em", "!": "-0.167em", " ": "0.333em", "quad": "1em",
    "qquad": "2em", "thinspace": "0.167em", "medspace": "0.222em", "thickspace": "0.278em", "enspace": "0.5em",
    "negthinspace": "-0.167em", "\n": "0.333em",
}  # fmt: skip
# The first letters of an alphabet: capital, small, digit; and letters that are elsewhere.
ALPHABETS: dict[str, tuple[int, int, int, dict[str, str]]] = {
    "mathbf": (0x1D400, 0x1D41A, 0x1D7CE, {}),
    "boldsymbol": (0x1D468, 0x1D482, 0x1D7CE, {}),
    "mathbb": (0x1D538, 0x1D552, 0x1D7D8, _table("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ")),
    "mathcal": (0x1D49C, 0x1D4B6, 0, _table("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ e ℯ g ℊ o ℴ")),
    "mathfrak": (0x1D504, 0x1D51E, 0, _table("C ℭ H ℌ I ℑ R ℜ Z ℨ")),
    "mathsf": (0x1D5A0, 0x1D5BA, 0x1D7E2, {}),
    "mathtt": (0x1D670, 0x1D68A, 0x1D7F6, {}),
    "mathit": (0x1D434, 0x1D44E, 0, {"h": "ℎ"}),
}
ALIKE = {"mathscr": "mathcal", "bm": "boldsymbol", "bf": "mathbf", "pmb": "boldsymbol", "Bbb": "mathbb"}
