"""Where keys and values are in the paged cache, [pages, 2, layers, page, heads, dim]."""

from extensibility import _MutableInputTensor as MutableInputTensor

from .tile import F32

comptime U32 = DType.uint32


@fieldwise_init
struct Cache(ImplicitlyCopyable, Movable):
    """Where one layer's keys and values are in [pages, 2, layers, page, heads, dim]."""

    var page_size: Int
    var heads: Int
    var dim: Int
    var page_stride: Int
    var layer_offset: Int
    var value_offset: Int

    @always_inline
    def stride(self) -> Int:
        """Elements of a token."""
        return self.heads * self.dim

    @always_inline
    def at(self, table: Pointer[Scalar[U32], _], position: Int) -> Int:
        """The offset of a token's keys; table has the sequence's pages."""
        var page = Int(table.unsafe_offset(position // self.page_size).unsafe_load())
        return (
            page * self.page_stride
            + self.layer_offset
            + position % self.page_size * self.stride()
        )


def cache_of(
    pages: MutableInputTensor[dtype=F32, rank=6, ...], page_stride: Int, layer: Int
) -> Cache:
    """Where a layer's keys and values are; page_stride is -1 where pages lie side by side."""
    var page = pages.dim_size(3) * pages.dim_size(4) * pages.dim_size(5)
    var packed = pages.dim_size(1) * pages.dim_size(2) * page
    return Cache(
        page_size=pages.dim_size(3),
        heads=pages.dim_size(4),
        dim=pages.dim_size(5),
        page_stride=packed if page_stride < 0 else page_stride,
        layer_offset=layer * page,
        value_offset=pages.dim_size(2) * page,
    )
