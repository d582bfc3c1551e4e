/// The short way of a call: a shape that was seen before needs no planning, no Python and no checks but a few compares.
///
/// Whatever is unusual is left to the long way, which also says what is wrong: here it is only noticed. Nothing in this
/// file knows torch; what it needs of it comes in as objects.
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "bound_plan.hpp"
#include "runtime/driver.hpp"
#include "tensor.hpp"

namespace humming_cutlass {
namespace {

constexpr uintptr_t kAlignment = 16;  // of activations, for every kernel

/// The extents of a tensor.
struct Shape {
  int ndim = 0;
  std::array<int64_t, kMaxRank> extents{};

  static bool fits(int ndim) { return ndim >= 1 && ndim <= kMaxRank; }

  explicit Shape(dlpack::Tensor const& view) : ndim(view.ndim) {
    for (int i = 0; i < ndim; ++i) {
      extents[i] = view.shape[i];
    }
  }

  bool operator==(Shape const& other) const { return ndim == other.ndim && extents == other.extents; }
};

struct ShapeHash {
  size_t operator()(Shape const& shape) const {
    uint64_t hash = uint64_t(shape.ndim);
    for (int i = 0; i < shape.ndim; ++i) {
      hash = (hash ^ uint64_t(shape.extents[i])) * 0x9E3779B97F4A7C15ull;
    }
    return size_t(hash ^ hash >> 32);
  }
};

std::vector<nb::object> items_of(nb::tuple const& tuple) {
  std::vector<nb::object> items;
  for (nb::handle const item : tuple) {
    items.push_back(nb::borrow(item));
  }
  return items;
}

/// What an earlier call with activations of one shape came to. The GIL guards the tables; entries never change.
class Launches {
 public:
  Launches(nb::object tensor_type, nb::tuple const& weight, nb::object grad_enabled, nb::object empty,
           nb::object empty_on_current_device)
      : tensor_type_(std::move(tensor_type)),
        weight_(items_of(weight)),
        grad_enabled_(std::move(grad_enabled)),
        empty_(std::move(empty)),
        empty_on_current_device_(std::move(empty_on_current_device)),
        api_(exchange_api_of(reinterpret_cast<PyTypeObject*>(tensor_type_.ptr()))) {
    if (api_ == nullptr || api_->borrow == nullptr) {
      throw ArgumentTypeError("tensor_type", nb::cast<std::string>(nb::str(tensor_type_)),
                              "a type with __dlpack_c_exchange_api__ that lends its tensors");
    }
    for (nb::object const& tensor : weight_) {
      addresses_.push_back(address_of(tensor));
    }
  }

  /// Keeps the launch for activations like `a`. One that is known stays as it is: another thread may be using it.
  void remember(nb::handle a, bool batch_invariant, nb::object plan, int split_k, nb::tuple layout, nb::dict options) {
    TensorArgument const source(a, "a", TensorArgument::Hold::kBorrow);
    if (!Shape::fits(source.view().ndim)) {
      return;
    }
    BoundPlan* const bound = nb::cast<BoundPlan*>(plan);
    tables_[batch_invariant].emplace(Shape(source.view()),
                                     Entry{std::move(plan), bound, split_k, std::move(layout), std::move(options)});
  }

  size_t size() const { return tables_[0].size() + tables_[1].size(); }

  std::vector<nb::object> const& weight() const { return weight_; }

  /// The result, or None where the call must go the long way.
  nb::object call(nb::handle a, bool batch_invariant) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(a.ptr())) != tensor_type_.ptr()) {
      return nb::none();  // a subclass may mean something else by a call
    }
    dlpack::Tensor view;
    if (api_->borrow(a.ptr(), &view) != 0) {
      PyErr_Clear();
      return nb::none();
    }
    if (view.device.type != dlpack::kCuda || !Shape::fits(view.ndim)) {
      return nb::none();
    }
    auto const& table = tables_[batch_invariant];
    auto const found = table.find(Shape(view));
    if (found == table.end()) {
      return nb::none();
    }
    for (size_t i = 0; i < weight_.size(); ++i) {
      if (addresses_[i] != nullptr && address_of(weight_[i]) != addresses_[i]) {
        return nb::none();  // the same tensor with another memory: `tensor.data = ...`
      }
    }
    Entry const& entry = found->second;
    GemmPlan const& plan = entry.bound->plan();
    GemmWeight const& weight = plan.weight();
    char* const data = static_cast<char*>(view.data) + view.byte_offset;
    if (view.device.id != weight.device || !is_element(view.dtype, plan.element_a()) || !is_contiguous(view) ||
        reinterpret_cast<uintptr_t>(data) % kAlignment != 0 || wants_gradient(a)) {
      return nb::none();
    }
    int64_t rows = 1;
    for (int i = 0; i < view.ndim - 1; ++i) {
      rows *= view.shape[i];
    }

    dlpack::Tensor target;
    nb::object result = allocate(entry, weight.device, target);
    void* stream = nullptr;
    if (api_->current_stream(dlpack::kCuda, weight.device, &stream) != 0) {
      throw nb::python_error();
    }
    Matrix const matrix_a{data, rows, rows > 1 ? weight.k : stride_of_single_row(weight.k)};
    Matrix const matrix_d{static_cast<char*>(target.data) + target.byte_offset, rows, weight.n};
    entry.bound->launch(matrix_a, matrix_d, static_cast<driver::Stream>(stream), entry.split_k);
    return result;
  }

 private:
  struct Entry {
    nb::object plan;  ///< keeps `bound` alive
    BoundPlan* bound;
    int split_k;
    nb::tuple layout;  ///< (shape, strides, dtype) of the result
    nb::dict options;  ///< its dtype and device
  };

  /// Where a tensor's elements are; null where there is none, or it is not to be had.
  void const* address_of(nb::object const& tensor) const {
    dlpack::Tensor view;
    if (tensor.is_none() || api_->borrow(tensor.ptr(), &view) != 0) {
      PyErr_Clear();
      return nullptr;
    }
    return static_cast<char const*>(view.data) + view.byte_offset;
  }

  bool wants_gradient(nb::handle a) const {
    static PyObject* const name = PyUnicode_InternFromString("requires_grad");
    nb::object const required = nb::steal(PyObject_GetAttr(a.ptr(), name));
    if (!required.is_valid()) {
      throw nb::python_error();
    }
    return required.ptr() != Py_False && nb::cast<bool>(grad_enabled_());
  }

  /// A new tensor for the result, and its view.
  nb::object allocate(Entry const& entry, int device, dlpack::Tensor& view) const {
    if (!empty_on_current_device_.is_none() && driver::is_current(driver::device_state(device))) {
      nb::object result = call_with(empty_on_current_device_, entry.layout, nullptr);
      borrow(result, view);
      if (view.device.id == device) {  // else the framework has yet to switch devices
        return result;
      }
    }
    nb::tuple const shape = nb::make_tuple(nb::steal(PySequence_GetItem(entry.layout.ptr(), 0)));
    nb::object result = call_with(empty_, shape, entry.options.ptr());
    borrow(result, view);
    return result;
  }

  static nb::object call_with(nb::object const& function, nb::tuple const& arguments, PyObject* options) {
    PyObject* const result = PyObject_Call(function.ptr(), arguments.ptr(), options);
    if (result == nullptr) {
      throw nb::python_error();
    }
    return nb::steal(result);
  }

  void borrow(nb::object const& tensor, dlpack::Tensor& view) const {
    if (api_->borrow(tensor.ptr(), &view) != 0) {
      throw nb::python_error();
    }
  }

  nb::object tensor_type_;
  std::vector<nb::object> weight_;
  nb::object grad_enabled_;
  nb::object empty_;
  nb::object empty_on_current_device_;
  dlpack::ExchangeApi const* api_;
  std::vector<void const*> addresses_;                     ///< of weight_
  std::unordered_map<Shape, Entry, ShapeHash> tables_[2];  ///< by batch_invariant
};

/// Calls a torch.nn.Module whose `forward` is the launch of its weight, where the call comes to nothing but that.
class ModuleCall {
 public:
  ModuleCall(nb::object forward, nb::tuple const& absent, nb::tuple const& empty, nb::tuple const& hooks,
             nb::tuple const& buffers)
      : forward_(std::move(forward)),
        absent_(items_of(absent)),
        empty_(items_of(empty)),
        hooks_(items_of(hooks)),
        buffers_(items_of(buffers)) {}

  /// The result, or None where the call must go the long way.
  nb::object call(nb::handle module, nb::handle arguments) const {
    if (PyTuple_Size(arguments.ptr()) != 1 || !is_plain(module)) {
      PyErr_Clear();
      return nb::none();
    }
    nb::object const dict = nb::steal(PyObject_GenericGetDict(module.ptr(), nullptr));
    if (!dict.is_valid()) {
      throw nb::python_error();
    }
    for (nb::object const& name : absent_) {
      if (item(dict, name.ptr()) != nullptr) {
        return nb::none();
      }
    }
    for (nb::object const& name : empty_) {
      if (!is_empty(item(dict, name.ptr()))) {
        return nb::none();
      }
    }
    for (nb::object const& hooks : hooks_) {
      if (!is_empty(hooks.ptr())) {
        return nb::none();
      }
    }
    // A strong reference: another thread may forget the launches meanwhile.
    nb::object const held = nb::borrow(launches_of(dict));
    PyObject* const buffers = item(dict, name_.buffers);
    PyObject* const batch_invariant = item(dict, name_.batch_invariant);
    if (!held.is_valid() || buffers == nullptr || (batch_invariant != Py_True && batch_invariant != Py_False)) {
      return nb::none();
    }
    Launches& launches = *nb::inst_ptr<Launches>(held);
    std::vector<nb::object> const& weight = launches.weight();
    if (weight.size() != buffers_.size()) {
      return nb::none();
    }
    for (size_t i = 0; i < weight.size(); ++i) {
      if (item(buffers, buffers_[i].ptr()) != weight[i].ptr()) {
        return nb::none();  // moved, replaced by hand, or for one call by torch.func.functional_call
      }
    }
    return launches.call(nb::handle(PyTuple_GetItem(arguments.ptr(), 0)), batch_invariant == Py_True);
  }

 private:
  /// Whether neither a subclass nor a patch of the class has another `forward`.
  bool is_plain(nb::handle module) const {
    PyObject* const found = PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(module.ptr())), name_.forward);
    Py_XDECREF(found);
    return found == forward_.ptr();
  }

  static PyObject* item(nb::handle dict, PyObject* key) {
    PyObject* const found = PyDict_GetItemWithError(dict.ptr(), key);
    if (found == nullptr && PyErr_Occurred() != nullptr) {
      throw nb::python_error();
    }
    return found;
  }

  static bool is_empty(PyObject* dict) { return dict != nullptr && PyDict_Check(dict) && PyDict_Size(dict) == 0; }

  /// The launches that `ops` keeps on the module's packed weight; borrowed, or null.
  PyObject* launches_of(nb::handle dict) const {
    PyObject* const packed = item(dict, name_.packed);
    if (packed == nullptr || packed == Py_None) {
      return nullptr;
    }
    nb::object const fields = nb::steal(PyObject_GenericGetDict(packed, nullptr));
    if (!fields.is_valid()) {
      throw nb::python_error();
    }
    PyObject* const plans = item(fields, name_.plans);
    PyObject* const found = plans != nullptr && PyDict_Check(plans) ? item(plans, name_.launches) : nullptr;
    return found != nullptr && reinterpret_cast<PyObject*>(Py_TYPE(found)) == type_ ? found : nullptr;
  }

  struct Names {
    PyObject* forward = PyUnicode_InternFromString("forward");
    PyObject* packed = PyUnicode_InternFromString("_packed");
    PyObject* plans = PyUnicode_InternFromString("plans");
    PyObject* launches = PyUnicode_InternFromString("launches");
    PyObject* buffers = PyUnicode_InternFromString("_buffers");
    PyObject* batch_invariant = PyUnicode_InternFromString("batch_invariant");
  };
  Names name_;
  PyObject* type_ = nb::type<Launches>().ptr();
  nb::object forward_;
  std::vector<nb::object> absent_;
  std::vector<nb::object> empty_;
  std::vector<nb::object> hooks_;
  std::vector<nb::object> buffers_;
};

}  // namespace

void bind_launches(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Launches>(module, "Launches", "The launches that calls with one packed weight came to, by the shape of a.")
      .def(nb::init<nb::object, nb::tuple, nb::object, nb::object, nb::object>(), "tensor_type"_a, "weight"_a,
           "grad_enabled"_a, "empty"_a, "empty_on_current_device"_a.none())
      .def("remember", &Launches::remember, "a"_a, "batch_invariant"_a, "plan"_a, "split_k"_a, "layout"_a, "options"_a,
           "Keeps the launch of a call with activations a.")
      .def("__len__", &Launches::size)
      .def("call", &Launches::call, "a"_a.none(), "batch_invariant"_a,
           "Returns the result of a call that is like one before, or None where it is not.");
  nb::class_<ModuleCall>(module, "ModuleCall", "Calls of a torch.nn.Module that come to nothing but a launch.")
      .def(nb::init<nb::object, nb::tuple, nb::tuple, nb::tuple, nb::tuple>(), "forward"_a, "absent"_a, "empty"_a,
           "hooks"_a, "buffers"_a)
      .def("call", &ModuleCall::call, "Returns the result of such a call, or None where it is none.");
}

}  // namespace humming_cutlass
